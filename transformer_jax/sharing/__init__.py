"""Exchange trained models with other software: CTranslate2, Hugging Face, and safetensors."""
