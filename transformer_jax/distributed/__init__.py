"""How processes of one run find each other, agree, and stop together (section 5.2)."""
