"""
MiniLM-L6-H384 (a BERT of six layers) as a sentence encoder, in plain torch.

Names of the parameters are those of the published weights, so that these load without renaming.

Source: sentence-transformers/all-MiniLM-L6-v2 (Apache-2.0): its config.json; mean pooling over the tokens, then unit
length. BERT: Devlin et al. 2019.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, POSITIONS, HIDDEN, LAYERS, HEADS, INTERMEDIATE = 30522, 512, 384, 6, 12, 1536
NORM_EPS = 1e-12
MAX_TOKENS = 256
"""What the model was trained with; longer sentences are cut."""


class SentenceEncoder(nn.Module):
    """int64[batch, tokens] and a mask of 1 (token) and 0 (padding) -> float32[batch, 384] of unit length."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = Embeddings()
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(Layer() for _ in range(LAYERS))})

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        x = self.embeddings(tokens)
        attended = mask[:, None, None, :].bool()
        for layer in self.encoder["layer"]:
            x = layer(x, attended)
        weights = mask[:, :, None].to(x.dtype)
        return F.normalize((x * weights).sum(1) / weights.sum(1).clamp(min=1e-9), dim=1)


class Embeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCABULARY, HIDDEN)
        self.position_embeddings = nn.Embedding(POSITIONS, HIDDEN)
        self.token_type_embeddings = nn.Embedding(2, HIDDEN)
        self.LayerNorm = nn.LayerNorm(HIDDEN, eps=NORM_EPS)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        first_kind = self.token_type_embeddings.weight[0]
        return self.LayerNorm(self.word_embeddings(tokens) + self.position_embeddings(positions) + first_kind)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        attention = {"query": nn.Linear(HIDDEN, HIDDEN), "key": nn.Linear(HIDDEN, HIDDEN)}
        self.attention = nn.ModuleDict(
            {"self": nn.ModuleDict({**attention, "value": nn.Linear(HIDDEN, HIDDEN)}), "output": AddAndNorm(HIDDEN)}
        )
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(HIDDEN, INTERMEDIATE)})
        self.output = AddAndNorm(INTERMEDIATE)

    def forward(self, x: Tensor, attended: Tensor) -> Tensor:
        own = self.attention["self"]
        query, key, value = (heads(own[name](x)) for name in ("query", "key", "value"))
        seen = F.scaled_dot_product_attention(query, key, value, attn_mask=attended)
        x = self.attention["output"](seen.transpose(1, 2).flatten(2), x)
        return self.output(F.gelu(self.intermediate["dense"](x)), x)


class AddAndNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, HIDDEN)
        self.LayerNorm = nn.LayerNorm(HIDDEN, eps=NORM_EPS)

    def forward(self, x: Tensor, added: Tensor) -> Tensor:
        return self.LayerNorm(self.dense(x) + added)


def heads(x: Tensor) -> Tensor:
    """float32[batch, tokens, 384] -> float32[batch, heads, tokens, 32]"""
    return x.unflatten(2, (HEADS, HIDDEN // HEADS)).transpose(1, 2)
