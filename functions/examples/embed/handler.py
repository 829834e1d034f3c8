"""
What do sentences mean? Text, or JSON: a sentence, a list of them, or {"sentences": [...]}.

Answers ``{"embeddings": [384 numbers each, of unit length], "similarities": [cosine of each with each]}``.
"""

from pathlib import Path
from typing import Any

import torch
from minilm import MAX_TOKENS, SentenceEncoder
from tokenizers import Tokenizer

from gpufaas_functions import load_module

FOLDER = Path(__file__).parent
AT_ONCE = 256


def load(device: str) -> Any:
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    tokenizer.enable_truncation(MAX_TOKENS)
    tokenizer.enable_padding()
    return tokenizer, load_module(SentenceEncoder, FOLDER / "weights.safetensors", device)


def handle(model: Any, event: Any, context: Any) -> Any:
    try:
        given = event.json()
    except ValueError:
        given = event.body.decode(errors="replace").strip()
    sentences = given.get("sentences") if isinstance(given, dict) else given
    if isinstance(sentences, str):
        sentences = [sentences]
    if not isinstance(sentences, list) or not all(isinstance(each, str) and each for each in sentences):
        sentences = []
    if not 1 <= len(sentences) <= AT_ONCE:
        error = f'send text, or JSON: a sentence, a list of 1 to {AT_ONCE} sentences, or {{"sentences": [...]}}'
        return {"statusCode": 400, "body": {"error": error}}
    vectors = embed(model, sentences)
    return {"embeddings": vectors.tolist(), "similarities": (vectors @ vectors.T).tolist()}


def embed(model: Any, sentences: list[str]) -> torch.Tensor:
    """Return float32[sentences, 384], each of unit length, on the CPU."""
    tokenizer, encoder = model
    encoded = tokenizer.encode_batch(sentences)
    device = next(encoder.parameters()).device
    tokens = torch.tensor([each.ids for each in encoded], device=device)
    mask = torch.tensor([each.attention_mask for each in encoded], device=device)
    with torch.inference_mode():
        return encoder(tokens, mask).cpu()
