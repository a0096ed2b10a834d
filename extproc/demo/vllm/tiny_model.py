"""Make a tiny language model: ``python tiny_model.py DIRECTORY``, run by the engines' own interpreter.

Two Qwen3 layers with random weights (0.13 million parameters), a byte-level BPE tokenizer of some 400 tokens and a chat
template. Nothing is downloaded, and the same versions of the libraries make the same weights each time.

Its greedy text wanders with the prompt instead of repeating one token, so that two runs with equal text have read equal
KV. It consists of letters and punctuation only, and never ends by itself: what a test asks for is what it gets.
"""

from __future__ import annotations

import string
import sys
from pathlib import Path

VOCABULARY = 512  # at most: the text below holds fewer merges
SEED = 2  # with this one the text repeats itself little
WRITABLE = frozenset(string.ascii_letters + " .,;!?'")
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

# What the tokenizer learns its merges from: enough common words that a prompt is shorter in tokens than in characters.
TEXT = (
    "The gateway receives a request, picks one engine for the prefill and another engine for the decode.",
    "The prefill computes the keys and the values of the prompt; the decode reads the blocks and writes the answer.",
    "When the stream ends before the decode has read the blocks, the gateway asks the prefill engine to free them.",
    "A quick answer needs a short prompt, and a long prompt needs more blocks of memory than a short prompt does.",
)

# A message's content may be null (an assistant that called a tool).
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    f"{TURN_START}{{{{ message['role'] }}}}\n{{{{ message['content'] or '' }}}}{TURN_END}\n"
    "{%- endfor -%}"
    f"{{%- if add_generation_prompt -%}}{TURN_START}assistant\n{{%- endif -%}}"
)


def make_tokenizer(directory: Path) -> list[str]:
    """Train and save the tokenizer. Returns the text of each token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # type: ignore[import-not-found,unused-ignore]
    from transformers import PreTrainedTokenizerFast  # type: ignore[import-not-found,unused-ignore]

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[TURN_START],
        chat_template=CHAT_TEMPLATE,
    )
    wrapped.save_pretrained(directory)
    return [wrapped.decode([token]) for token in range(len(wrapped))]


def make_model(directory: Path, tokens: list[str]) -> None:
    """Draw and save the weights of a model with this vocabulary."""
    import torch  # type: ignore[import-not-found,unused-ignore]
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(SEED)
    config = Qwen3Config(
        vocab_size=len(tokens),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=2,  # TURN_END: the special tokens come first, in the order given to the trainer
        pad_token_id=0,
    )
    model = Qwen3ForCausalLM(config).to(torch.float32)
    # A score of exactly 0 never is the highest of hundreds of random ones.
    unwanted = [token for token, text in enumerate(tokens) if not text or not WRITABLE.issuperset(text)]
    with torch.no_grad():
        model.lm_head.weight[unwanted] = 0.0
    model.save_pretrained(directory)


def main() -> None:
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    make_model(directory, make_tokenizer(directory))


if __name__ == "__main__":
    main()
