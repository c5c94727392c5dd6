"""Exchange trained models with other programs: CTranslate2, Hugging Face, and safetensors."""
