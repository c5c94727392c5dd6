"""Runs in buckets of Google Cloud Storage and S3."""
