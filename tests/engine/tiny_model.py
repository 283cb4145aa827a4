# SPDX-License-Identifier: Apache-2.0
"""A random Llama of a few layers with a trained byte-level tokenizer: real engine, no download."""

import json
from pathlib import Path

VOCAB_SIZE = 512
HIDDEN_SIZE = 128
MAX_POSITION = 512

CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)

PICTURE_TOKENS = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]

TEXT = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind at all.",
    "Speculative decoding drafts several tokens and verifies them in one forward pass.",
    'user assistant system name value true false null [1, 2, 3] {"key": "text"}',
    "A request may finish early, be aborted, or be preempted when memory runs out.",
] * 4


def build_tiny_model(
    folder: Path,
    *,
    seed: int = 0,
    scale: float = 1.0,
    thinks: bool = False,
    pictures: bool = False,
) -> Path:
    """Write the model and its tokenizer to a folder.

    Args:
        folder: Where to; made if missing.
        seed: Of the random weights.
        scale: Factor on the output projection; below 1 the distribution is flatter.
        thinks: Its tokenizer has ``<think>`` and ``</think>``.
        pictures: Its tokenizer has the tokens that stand for a picture.

    Returns:
        The folder.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|start|>", "<|end|>"]
    if thinks:
        special += ["<think>", "</think>"]
    if pictures:
        special += PICTURE_TOKENS
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|endoftext|>",
        additional_special_tokens=special[1:],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_POSITION,
    )
    fast.save_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_POSITION,
        bos_token_id=None,
        eos_token_id=0,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                # Larger than the usual initialisation, so that logits differ between positions.
                weight.normal_(0, 0.12 if "embed" not in name else 1.0)
        model.lm_head.weight.mul_(scale)
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    return folder
