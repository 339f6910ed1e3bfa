"""Makes tiny multimodal models with real random weights. Run by the Python of the vLLM environment.

Usage: tiny_models.py OUTPUT_DIRECTORY

Nothing is downloaded. The weights are drawn so that logits depend on the pixels: with the almost constant
weights of `--load-format dummy` every picture gets the same answer, and a wrong one goes unnoticed.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch  # type: ignore[import-not-found]  # lives in the vLLM environment
from safetensors.torch import load_file, save_file  # type: ignore[import-not-found]  # as torch
from tokenizers import (  # type: ignore[import-not-found]  # as torch
    AddedToken,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    trainers,
)
from transformers import AutoConfig, AutoModelForImageTextToText  # type: ignore[import-not-found]  # as torch

MAX_LENGTH = 8192
WIDTH = 128
"""Hidden size of every text and vision model."""

_CORPUS = (
    "describe the picture and compare it with the other one",
    "the weather in the city is sunny, the answer is short",
    "what happens in this video from the first to the last second",
)

_QWEN_SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
)
_QWEN_PLAIN = ("<tool_call>", "</tool_call>", "<think>", "</think>")
_GEMMA_SPECIAL = (
    *("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"),
    *("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
)
_GEMMA_PLAIN = ("\n", "\n\n", "\n\n\n", "\n\n\n\n")

_QWEN_TEMPLATE = """\
{%- if tools %}<|im_start|>system
Call one of these functions when it helps:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Answer a call as <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ 'user' if message['role'] == 'tool' else message['role'] }}
{% if message['role'] == 'tool' %}Result: {% endif %}
{%- if message['content'] is string %}{{ message['content'] }}{% else %}
{%- for part in message['content'] or [] %}
{%- if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>
{%- elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}
{%- for call in message['tool_calls'] or [] %}<tool_call>{"name": {{ call['function']['name'] | tojson }}, \
"arguments": {{ call['function']['arguments'] | tojson }}}</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""

_GEMMA_TEMPLATE = """\
<bos>{% for message in messages %}<start_of_turn>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}
{%- for part in message['content'] %}
{%- if part['type'] == 'image' %}<start_of_image>{% else %}{{ part['text'] }}{% endif %}
{%- endfor %}{% endif %}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""


@dataclass(frozen=True)
class Vocabulary:
    """Token ids by text, and the size of the embedding that holds them (a multiple of 64)."""

    ids: dict[str, int]
    size: int


def main(output: Path) -> None:
    """Make all models below `output`; a model is complete or absent."""
    for name, make in (("qwen2.5-vl", qwen25), ("qwen3-vl", qwen3), ("gemma3", gemma3)):
        unfinished = output / f".{name}"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        make(unfinished)
        shutil.rmtree(output / name, ignore_errors=True)
        unfinished.rename(output / name)


def qwen25(folder: Path) -> None:
    """Qwen2.5-VL: image spans repeat one token, one per 28 x 28 pixels and 256 at most."""
    vocabulary = _qwen_tokenizer(folder)
    config = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        **_text(vocabulary, layers=2),
        "max_window_layers": 2,
        "rope_theta": 1000000.0,
        "rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [8, 12, 12]},
        "sliding_window": 32768,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        **_qwen_ids(vocabulary),
        "vision_config": {
            "model_type": "qwen2_5_vl",
            **_vision(depth=2, patch=14),
            "hidden_act": "silu",
            "in_chans": 3,
            "spatial_patch_size": 14,
            "window_size": 112,
            "fullatt_block_indexes": [1],
            "tokens_per_second": 2,
        },
    }
    processor = {
        "min_pixels": 56 * 56,
        "max_pixels": 448 * 448,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.48, 0.46, 0.41],
        "image_std": [0.27, 0.26, 0.28],
        "processor_class": "Qwen2_5_VLProcessor",
    }
    video = {"video_processor_type": "Qwen2VLVideoProcessor", "min_frames": 4, "max_frames": 8, "fps": 2}
    _write(folder, "config", config)
    _write(folder, "preprocessor_config", {**processor, "image_processor_type": "Qwen2VLImageProcessor"})
    _write(folder, "video_preprocessor_config", {**processor, **video})
    _weights(folder)


def qwen3(folder: Path) -> None:
    """Qwen3-VL: image spans repeat one token, video spans mix in a text of the time of every frame pair."""
    vocabulary = _qwen_tokenizer(folder)
    config = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "text_config": {
            "model_type": "qwen3_vl_text",
            **_text(vocabulary, layers=4),
            "head_dim": 64,
            "rope_theta": 5000000,
            "rope_scaling": {
                "rope_type": "default",
                "mrope_section": [12, 10, 10],
                "mrope_interleaved": True,
            },
            "tie_word_embeddings": True,
            "attention_bias": False,
            "eos_token_id": vocabulary.ids["<|im_end|>"],
        },
        "vision_config": {
            "model_type": "qwen3_vl",
            **_vision(depth=4, patch=16),
            "hidden_act": "gelu_pytorch_tanh",
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [0, 1, 2],
        },
        **_qwen_ids(vocabulary),
        "tie_word_embeddings": True,
        "dtype": "float32",
    }
    processor = {
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "processor_class": "Qwen3VLProcessor",
    }
    image = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": {"shortest_edge": 256 * 256, "longest_edge": 512 * 512},
    }
    video = {
        "video_processor_type": "Qwen3VLVideoProcessor",
        "size": {"shortest_edge": 64 * 64, "longest_edge": 512 * 512},
        "fps": 2,
        "min_frames": 4,
        "max_frames": 8,
    }
    _write(folder, "config", config)
    _write(folder, "preprocessor_config", {**processor, **image})
    _write(folder, "video_preprocessor_config", {**processor, **video})
    _weights(folder)


def gemma3(folder: Path) -> None:
    """Gemma3: every image span is 20 tokens, 16 of them soft tokens, the others newlines and brackets."""
    tokens = {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    }
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    vocabulary = _tokenizer(
        folder, _GEMMA_SPECIAL, _GEMMA_PLAIN, {**names, **tokens, "extra_special_tokens": tokens}
    )
    (folder / "chat_template.jinja").write_text(_GEMMA_TEMPLATE, encoding="utf-8")
    vision = _vision(depth=2, patch=14)
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "mm_tokens_per_image": 16,
        "boi_token_index": vocabulary.ids["<start_of_image>"],
        "eoi_token_index": vocabulary.ids["<end_of_image>"],
        "image_token_index": vocabulary.ids["<image_soft_token>"],
        "eos_token_id": vocabulary.ids["<eos>"],
        "text_config": {
            "model_type": "gemma3_text",
            **_text(vocabulary, layers=2),
            "hidden_act": "gelu_pytorch_tanh",
            "head_dim": 64,
            "sliding_window": 1024,
        },
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": vision["hidden_size"],
            "intermediate_size": vision["intermediate_size"],
            "num_hidden_layers": vision["depth"],
            "num_attention_heads": vision["num_heads"],
            "patch_size": vision["patch_size"],
            "image_size": 112,
            "vision_use_head": False,
        },
        "dtype": "float32",
    }
    processor = {"processor_class": "Gemma3Processor", "image_seq_length": 16}
    image = {
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": 112, "width": 112},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "do_pan_and_scan": False,
    }
    _write(folder, "config", config)
    _write(folder, "preprocessor_config", {**processor, **image})
    _write(folder, "processor_config", processor)
    _weights(folder, gemma=True)
    # transformers saves the vision tower one level higher than vLLM looks for it.
    file = folder / "model.safetensors"
    renamed = {
        name.replace("vision_tower.", "vision_tower.vision_model.", 1): tensor
        for name, tensor in load_file(file).items()
    }
    save_file(renamed, file, metadata={"format": "pt"})


def _text(vocabulary: Vocabulary, *, layers: int) -> dict[str, Any]:
    return {
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": MAX_LENGTH,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "vocab_size": vocabulary.size,
        "dtype": "float32",
    }


def _vision(*, depth: int, patch: int) -> dict[str, Any]:
    return {
        "depth": depth,
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_heads": 2,
        "in_channels": 3,
        "out_hidden_size": WIDTH,
        "patch_size": patch,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }


def _qwen_ids(vocabulary: Vocabulary) -> dict[str, int]:
    return {
        "bos_token_id": vocabulary.ids["<|endoftext|>"],
        "eos_token_id": vocabulary.ids["<|im_end|>"],
        "vision_start_token_id": vocabulary.ids["<|vision_start|>"],
        "vision_end_token_id": vocabulary.ids["<|vision_end|>"],
        "vision_token_id": vocabulary.ids["<|vision_pad|>"],
        "image_token_id": vocabulary.ids["<|image_pad|>"],
        "video_token_id": vocabulary.ids["<|video_pad|>"],
    }


def _qwen_tokenizer(folder: Path) -> Vocabulary:
    names = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    vocabulary = _tokenizer(folder, _QWEN_SPECIAL, _QWEN_PLAIN, names)
    (folder / "chat_template.jinja").write_text(_QWEN_TEMPLATE, encoding="utf-8")
    _write(folder, "generation_config", {"eos_token_id": vocabulary.ids["<|im_end|>"], "do_sample": False})
    return vocabulary


def _tokenizer(
    folder: Path, special: tuple[str, ...], plain: tuple[str, ...], config: dict[str, Any]
) -> Vocabulary:
    """A byte-level BPE tokenizer: any text can be encoded, whatever the corpus held."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_CORPUS * 20, trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in plain])
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    common = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_LENGTH,
        "clean_up_tokenization_spaces": False,
    }
    _write(folder, "tokenizer_config", {**common, **config})
    ids = {text: tokenizer.token_to_id(text) for text in (*special, *plain)}
    return Vocabulary(ids, -(-tokenizer.get_vocab_size() // 64) * 64)


def _weights(folder: Path, *, gemma: bool = False) -> None:
    """Random weights of a size that lets every layer, and so every pixel, move the logits."""
    torch.manual_seed(11)
    model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder)).float()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if tensor.dim() == 1 and "bias" in name:
                tensor.normal_(0, 0.02)
            elif tensor.dim() == 1:
                # Gemma's own norms multiply by 1 + weight.
                tensor.fill_(0.0 if gemma and "vision_tower" not in name else 1.0)
            elif "embed_tokens" in name or "lm_head" in name:
                # Small beside the layers, else the last token alone decides. Gemma scales it by sqrt(WIDTH).
                tensor.normal_(0, 0.05 if gemma else 0.15)
            elif "pos_embed" in name or "position_embedding" in name:
                tensor.normal_(0, 0.1)
            else:
                tensor.normal_(0, 3.0 / tensor[0].numel() ** 0.5)
    config = (folder / "config.json").read_text("utf-8")
    model.save_pretrained(folder)
    # save_pretrained writes the configuration again with defaults of its own.
    (folder / "config.json").write_text(config, encoding="utf-8")


def _write(folder: Path, name: str, content: dict[str, Any]) -> None:
    (folder / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
