"""Writes a GGUF file as the float32 Hugging Face directory that both peers load: python make_model.py FILE.gguf OUT_DIR"""
import sys
from pathlib import Path

import torch
import transformers

source, out = Path(sys.argv[1]), sys.argv[2]
options = {"gguf_file": source.name}
read = transformers.AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **options)
settings = {key: value for key, value in read.config.to_dict().items() if key != "quantization_config"}
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings)).to(torch.float32)
model.load_state_dict(read.state_dict())
model.save_pretrained(out)
transformers.AutoTokenizer.from_pretrained(source.parent, **options).save_pretrained(out)
