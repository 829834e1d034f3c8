from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from safetensors.torch import load_file  # noqa: E402

PARAMETERS = {  # torchvision's, by its documentation
    "alexnet": 61_100_840,
    "densenet121": 7_978_856,
    "resnet18": 11_689_512,
    "resnet50": 25_557_032,
    "squeezenet1_1": 1_235_496,
    "vgg11": 132_863_336,
    "vgg16": 138_357_544,
}


@pytest.fixture(scope="module")
def architectures(deployed: Any) -> Any:
    return deployed("squeezenet").handler.architectures


@pytest.mark.parametrize("arch", sorted(PARAMETERS))
def test_an_architecture_has_as_many_parameters_as_torchvisions(architectures: Any, arch: str) -> None:
    with torch.device("meta"):
        module = architectures.ARCHITECTURES[arch]()
        scores = module.eval()(torch.empty(1, 3, 224, 224))

    assert sum(each.numel() for each in module.parameters()) == PARAMETERS[arch]
    assert scores.shape == (1, 1000)


@pytest.mark.parametrize("arch", ["squeezenet1_1", "resnet18", "densenet121"])
@pytest.mark.slow
def test_weights_are_the_same_at_every_build_and_give_sane_scores(
    architectures: Any, arch: str, tmp_path: Path
) -> None:
    architectures.write_random_weights(arch, tmp_path / "one.safetensors")
    architectures.write_random_weights(arch, tmp_path / "two.safetensors")
    assert (tmp_path / "one.safetensors").read_bytes() == (tmp_path / "two.safetensors").read_bytes()

    model = architectures.load(arch, tmp_path / "one.safetensors", "cpu")
    tops = [architectures.classify(model, architectures.seeded_image(seed)) for seed in (1, 2)]

    assert tops[0] != tops[1]
    for top in tops:
        scores = [score for _, score in top]
        assert scores == sorted(scores, reverse=True)
        assert 0.001 < scores[0] < 0.999


def test_the_deployed_model_answers_as_a_plain_one(deployed: Any, architectures: Any) -> None:
    """The same weights copied into a module that was built the ordinary way."""
    squeezenet = deployed("squeezenet")
    plain = architectures.ARCHITECTURES["squeezenet1_1"]().eval()
    plain.load_state_dict(load_file(squeezenet.folder / "weights.safetensors"))

    status, answer = squeezenet.call({"seed": 5})

    assert status == 200
    assert answer == {
        "arch": "squeezenet1_1", "top": architectures.classify(plain, architectures.seeded_image(5)), "size": 224,
    }  # fmt: skip


def test_an_image_may_be_sent_as_raw_floats(deployed: Any, architectures: Any) -> None:
    squeezenet = deployed("squeezenet")
    for size in (224, 96):
        raw = architectures.seeded_image(5, size).numpy().tobytes()

        assert squeezenet.call(raw) == squeezenet.call({"seed": 5, "size": size})


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", b"[]", b"x" * 602_111, {"seed": "1"}, {"seed": 1.5}, {"seed": 1, "size": 10**6}, {"seed": 2**70},
     {"seed": True}, b"\xff" * 12],
)  # fmt: skip
def test_what_is_no_image_is_refused(deployed: Any, body: Any) -> None:
    status, answer = deployed("squeezenet").call(body)

    assert status == 400
    assert "seed" in answer["error"]


def test_every_cnn_of_the_stack_has_its_architecture(stack: dict[str, Any], architectures: Any) -> None:
    folder = Path(__file__).parent.parent
    handlers = {name: (folder / name / "handler.py").read_text() for name in stack["functions"]}
    found = {name: text.split('serving("')[1].split('"')[0] for name, text in handlers.items() if 'serving("' in text}
    assert sorted(found.values()) == sorted(architectures.ARCHITECTURES)
    for name, arch in found.items():
        assert f'write_random_weights("{arch}")' in (folder / name / "build.py").read_text()
