"""A tokenizer for tests: tokens are the bytes of the text, so a token id says which letter it is."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models

# Bytes that no text holds.
SPECIAL_TOKENS = {"<0>": 0, "<1>": 1, "<end>": 2}
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}|{% endfor %}"


def write_byte_tokenizer(folder: Path) -> Path:
    """Make `folder` one that the text room can read; token 2 ends an answer."""
    vocabulary = SPECIAL_TOKENS | {f"<0x{byte:02X}>": byte for byte in range(3, 256)}
    library = Tokenizer(models.BPE(vocabulary, [], unk_token="<0>", byte_fallback=True))
    library.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    library.add_special_tokens(list(SPECIAL_TOKENS))
    folder.mkdir(parents=True, exist_ok=True)
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder
