# SPDX-License-Identifier: Apache-2.0
"""A random Idefics3: a vision tower of two layers before the tiny Llama, with its processor.

Of the vision models that vLLM 0.32 can load without torchvision, which CPU installations lack, this
one needs the fewest parts. It is made offline.
"""

import json
from pathlib import Path

from tiny_model import PICTURE_TOKENS, build_tiny_model

IMAGE_SIZE, PATCH_SIZE, SCALE = 56, 14, 2
NUM_IMAGE_TOKENS = (IMAGE_SIZE // PATCH_SIZE // SCALE) ** 2


def build_tiny_vision_model(folder: Path) -> Path:
    """Write model, tokenizer and image processor to a folder.

    Args:
        folder: Where to; made if missing.

    Returns:
        The folder.
    """
    import torch
    from transformers import (
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
    )

    text = build_tiny_model(folder / "text", pictures=True)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(text)
    language = LlamaForCausalLM.from_pretrained(text)
    config = Idefics3Config(
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": IMAGE_SIZE,
            "patch_size": PATCH_SIZE,
        },
        text_config=language.config.to_dict(),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=SCALE,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = Idefics3ForConditionalGeneration(config).float()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() >= 2:
                weight.normal_(0, 0.12)
    model.model.text_model.load_state_dict(language.model.state_dict())
    model.lm_head.load_state_dict(language.lm_head.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    assert set(PICTURE_TOKENS) <= set(tokenizer.get_vocab())
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    image_processor = {
        "image_processor_type": "Idefics3ImageProcessor",
        "do_image_splitting": False,
        "size": {"longest_edge": IMAGE_SIZE},
        "max_image_size": {"longest_edge": IMAGE_SIZE},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(image_processor))
    processor = {"processor_class": "Idefics3Processor", "image_seq_len": NUM_IMAGE_TOKENS}
    (folder / "processor_config.json").write_text(json.dumps(processor))
    return folder
