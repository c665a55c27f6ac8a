"""`python tiny_model.py DIR`: a model with a tokenizer and a chat template, and no weights; in `DIR/adapter` an adapter
for it, which changes nothing. Needs `transformers`, `numpy` and `safetensors`.

It talks nonsense, which is all that a cache needs. An engine makes the weights up: vLLM with `--load-format dummy`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, PreTrainedTokenizerFast

HIDDEN, LAYERS, ADAPTER_RANK = 128, 2, 8
SPECIAL = ["<|pad|>", "<|bos|>", "<|end|>"]
SENTENCES = [
    "A conversation is a coat, the worker that has its cache is the hook, and the session id is the claim ticket.",
    "Whichever replica a request reaches, the ticket names the same hook until the owner hands it in.",
    "The quick brown fox jumps over the lazy dog, and 0123456789 of them watch.",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|bos|>{{ message.role }}\n{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|bos|>assistant\n{% endif %}"
)


def make(folder: Path) -> None:
    """Write the model's files into `folder`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=SPECIAL[0], bos_token=SPECIAL[1], eos_token=SPECIAL[2]
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(folder)
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(wrapped),
        hidden_size=HIDDEN,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    config.save_pretrained(folder)


def make_adapter(folder: Path) -> None:
    """Write a LoRA adapter of the model into `folder`."""
    folder.mkdir()
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": ADAPTER_RANK,
        "lora_alpha": ADAPTER_RANK,
        "target_modules": ["q_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    name = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    sizes = {"A": (ADAPTER_RANK, HIDDEN), "B": (HIDDEN, ADAPTER_RANK)}
    weights = {
        name.format(layer, half): numpy.zeros(size, "float32")
        for layer in range(LAYERS)
        for half, size in sizes.items()
    }
    save_file(weights, folder / "adapter_model.safetensors")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
    make_adapter(Path(sys.argv[1]) / "adapter")
