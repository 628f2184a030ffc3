"""`--compile`: compiled models train as uncompiled ones under every strategy; what can't be compiled is refused."""

import pytest
import torch

from muster.config import Options, check
from muster.errors import MusterError
from muster.train import compilation
from muster.train.models import build, place
from muster.train.parallel.strategy import Gradients
from tests.train.comparing import DIGITS, SPLITS, STEPS, TEXT, apart, losses, trained

# Compilers reorder sums, so the results agree within the precision of fp32, not bit for bit.
NEAR = 1e-4

WITHOUT_KERNELS = "import functools, torch; torch.compile = functools.partial(torch.compile, backend='aot_eager')"
"""torch's compiler without its last and slowest part: the kernels that torch has anyway run the graphs."""


def compiled(train, before="", **how):
    """The fixture `train` with `--compile=default`."""
    return lambda argv, size, ok: train([*argv, "--compile=default"], size, ok=ok, before=before, **how)


@pytest.mark.long  # the compiler takes minutes
@pytest.mark.process
@pytest.mark.once
def test_compiled_kernels_train_the_same(train, tmp_path):
    common = [*TEXT, *STEPS, "--optimizer=sgd", "--lr=0.01", "--max-steps=3", "--accumulate=2"]
    plain = trained(train, tmp_path, "single", 1, common, "plain")
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "kernels")}
    state = trained(compiled(train, env=env), tmp_path, "single", 1, common, "compiled")
    assert apart(plain, state)[0] < NEAR
    assert max(losses(plain, state)) < NEAR
    assert list((tmp_path / "kernels").rglob("*.so")), "nothing was compiled"


@pytest.mark.process
@pytest.mark.parametrize(
    "strategy",
    [pytest.param(each, marks=pytest.mark.full if each in ("fsdp", "tp") else pytest.mark.long) for each in SPLITS],
)
def test_compiled_transformers_train_the_same(train, tmp_path, strategy):
    world_size, split = SPLITS[strategy]
    common = [*TEXT, *STEPS, "--optimizer=sgd", "--lr=0.01", "--max-steps=2", *split]
    plain = trained(train, tmp_path, strategy, world_size, common, "plain")
    state = trained(compiled(train, WITHOUT_KERNELS), tmp_path, strategy, world_size, common, "compiled")
    assert apart(plain, state)[0] < NEAR
    assert max(losses(plain, state)) < NEAR


@pytest.mark.full
@pytest.mark.process
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.long)])
def test_compiled_images_train_the_same(train, tmp_path, strategy):
    common = [*DIGITS, *STEPS, "--model=resnet18", "--image-size=32", "--lr=0.001", "--max-steps=2"]
    plain = trained(train, tmp_path, strategy, 2, common, "plain")
    state = trained(compiled(train, WITHOUT_KERNELS), tmp_path, strategy, 2, common, "compiled")
    assert losses(plain, state, ("train_loss",))[0] < NEAR


@pytest.mark.parametrize("recompute", [pytest.param("selective", marks=pytest.mark.full), "full"])
def test_a_layer_that_is_computed_again_can_be_compiled(recompute):
    asked = Options(model="gpt-tiny", activation_checkpoint=recompute)
    layer = place(build(asked, 256, 32), torch.device("cpu"), torch.preserve_format, 0).layers["0"]
    gradients = []
    for forward in (layer.forward, torch.compile(layer.forward, backend="eager")):
        x = torch.linspace(-1, 1, 8 * 128).view(1, 8, 128).requires_grad_()
        forward(x).square().sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients)


def test_graphs_are_not_recorded_over_micro_batches(monkeypatch):
    modes = []

    def compile_(function, **how):
        modes.append(how["mode"])
        return function

    monkeypatch.setattr(torch, "compile", compile_)
    for asked in ({"compile": "default"}, {"compile": "max-autotune"}, {"compile": "max-autotune", "accumulate": 2}):
        compilation.compiled(len, Options(**asked))
    assert modes == [None, "max-autotune", "max-autotune-no-cudagraphs"]


def test_what_is_compiled():
    asked = Options(model="gpt-tiny", compile="default")
    model, gradients = build(asked, 256, 32), Gradients(1)
    compilation.compile_model(model, asked)
    compilation.compile_loss(gradients, asked)
    layers = list(model.layers.values())
    assert all("forward" in vars(layer) for layer in layers)
    assert "forward" not in vars(model)
    assert gradients.criterion is not Gradients.criterion
    images = Options(compile="default")
    model, gradients = build(images, 10, 32), Gradients(1)
    compilation.compile_model(model, images)
    compilation.compile_loss(gradients, images)
    assert "forward" in vars(model)
    assert gradients.criterion is Gradients.criterion
    plain = build(Options(), 10, 32)
    compilation.compile_model(plain, Options())
    assert "forward" not in vars(plain)


@pytest.mark.parametrize(
    ("strategy", "options", "fix"),
    [
        ("dp", {}, "train ddp --compile=default"),
        ("pipeline", {"model": "gpt-tiny", "schedule": "zero-bubble"}, "--schedule=interleaved"),
    ],
)
def test_what_cannot_be_compiled_is_refused(strategy, options, fix):
    with pytest.raises(MusterError, match="can't be") as raised:
        check(strategy, Options(compile="default", **options))
    assert fix in raised.value.fix


@pytest.mark.parametrize(("device", "variable"), [("cpu", "CXX"), ("cuda", "CC")])
def test_a_missing_compiler_is_told(monkeypatch, tmp_path, device, variable):
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(compilation.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(variable, raising=False)
    with pytest.raises(MusterError, match=r"torch needs a C or C\+\+ compiler") as raised:
        compilation.check(Options(compile="default"), torch.device(device))
    assert "on PATH" in raised.value.seen
    compilation.check(Options(), torch.device(device))
    own = tmp_path / "mine"
    own.write_text("")
    own.chmod(0o755)
    monkeypatch.setenv(variable, "mine")
    compilation.check(Options(compile="default"), torch.device(device))
    monkeypatch.setenv(variable, "other")
    with pytest.raises(MusterError) as raised:
        compilation.check(Options(compile="default"), torch.device(device))
    assert f"{variable}=other" in raised.value.seen


def test_on_cpus_torch_looks_for_no_clang_by_itself(monkeypatch, tmp_path):
    """By itself torch takes g++ only (`torch._inductor.config.cpp.cxx`): the first step would end in a traceback."""
    (tmp_path / "Python.h").touch()
    (tmp_path / "clang++").touch(mode=0o755)
    monkeypatch.setattr(compilation.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(MusterError) as raised:
        compilation.check(Options(compile="default"), torch.device("cpu"))
    assert "no g++ on PATH" in raised.value.seen
    monkeypatch.setenv("CXX", "clang++")
    compilation.check(Options(compile="default"), torch.device("cpu"))


def test_missing_headers_of_python_are_told(monkeypatch, tmp_path):
    monkeypatch.setattr(compilation.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(MusterError, match="headers of Python") as raised:
        compilation.check(Options(compile="default"), torch.device("cpu"))
    assert str(tmp_path / "Python.h") in raised.value.seen
