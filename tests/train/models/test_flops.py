"""Counted operations, and the peak rates and the energy of GPUs."""

import sys
import types
from importlib import metadata

import pytest
import torch
from torch import nn

from muster.config import Options
from muster.train.models import gpt, images
from muster.train.reporting.metrics import Energy
from muster.train.reporting.summary import count_flops, energy_of, peak_flops


@pytest.mark.parametrize(("name", "seq_len"), [("gpt-tiny", 128), ("gpt-small", 256), ("gpt-8b", 2048)])
def test_a_transformer_takes_what_its_matrices_and_its_attention_do(name, seq_len):
    """6 N + 12 L T d a token (arXiv 2204.02311, appendix B), N without the embedding, which multiplies nothing."""
    shape = gpt.shape_of(name)
    options = Options(model=name, activation_checkpoint="full")
    with torch.device("meta"):
        model = gpt.GPT(shape, 1000)
    matrices = sum(
        weight.numel() for key, weight in model.named_parameters() if weight.dim() > 1 and "embed" not in key
    )
    counted = count_flops(options, 1000, seq_len) / seq_len
    assert counted == 6 * matrices + 12 * shape.num_layers * seq_len * shape.dim


@pytest.mark.parametrize(("name", "size", "billions"), [("resnet50", 224, 4.09), ("resnet18", 224, 1.81)])
def test_a_resnet_takes_three_times_its_published_products(name, size, billions):
    """torchvision gives 4.09 and 1.81 GMAC forward; backward takes twice that, less the gradient of the images."""
    counted = count_flops(Options(model=name), 1000, size)
    assert counted == pytest.approx(3 * 2 * billions * 1e9, rel=0.02)
    assert counted < 3 * 2 * (billions + 0.005) * 1e9


def test_a_model_of_two_heads_counts():
    assert count_flops(Options(model="googlenet"), 10, 224) > 6 * 1.4e9


def test_a_linear_layer_counts_exactly(monkeypatch):
    monkeypatch.setattr(images, "construct", lambda *_: nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 7)))
    # Products of the forward pass, and of the weights' gradients; the images need no gradient.
    assert count_flops(Options(model="resnet18"), 7, 8) == 2 * 2 * 3 * 64 * 7


@pytest.mark.parametrize(
    ("name", "bf16", "tf32", "expected"),
    [
        ("NVIDIA H200", True, False, 989e12),
        ("NVIDIA H200", False, True, 494e12),
        ("NVIDIA H200", False, False, 67e12),
        ("NVIDIA H200 NVL", True, False, 835.5e12),
        ("NVIDIA A100-SXM4-80GB", True, False, 312e12),
        ("NVIDIA A100-PCIE-40GB", False, True, 156e12),
        ("A100-SXM4-40GB", True, False, 312e12),
        ("NVIDIA A100 80GB PCIe", True, False, 312e12),
        ("NVIDIA H100 80GB HBM3", True, False, 989.4e12),
        ("NVIDIA H100 PCIe", True, False, 756e12),
        ("NVIDIA H100 NVL", True, False, 835e12),
        ("NVIDIA GH200 480GB", True, False, 989.4e12),
        ("NVIDIA GH200 120GB", True, False, 989.4e12),
        ("NVIDIA B200", True, False, 2250e12),
        ("NVIDIA GB200", True, False, 2500e12),
        ("NVIDIA L4", True, False, 121e12),
        ("NVIDIA L40S", True, False, 362.05e12),
        ("NVIDIA A10", True, False, 125e12),
        ("Tesla V100-SXM2-32GB", False, True, 15.7e12),
        ("Tesla T4", False, False, 8.1e12),
    ],
)
def test_peaks_of_cards(monkeypatch, name, bf16, tf32, expected):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", tf32)
    found = peak_flops(torch.device("cuda", 0), bf16=bf16, convolves=True)
    assert found == pytest.approx(expected)


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA A100-SXM4-40GB MIG 3g.20gb",
        "NVIDIA A100-SXM-64GB",
        "NVIDIA A10G",
        "NVIDIA L40",
        "NVIDIA GeForce RTX 4090",
        "H200",
        "",
    ],
)
def test_parts_variants_and_others_are_unknown(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda", 0), bf16=True, convolves=True) is None


def test_a_cpu_has_no_peak_and_no_counter():
    assert peak_flops(torch.device("cpu"), bf16=True, convolves=True) is None
    energy = Energy(torch.device("cpu"))
    energy.count(True)
    energy.count(False)
    assert energy.joules is None


def stand_in(monkeypatch, **functions):
    """Replaces NVML and a GPU, which are not here. The names and units are those of the real binding."""
    import pynvml

    assert metadata.version("nvidia-ml-py")
    module = types.ModuleType("pynvml")
    for name, function in functions.items():
        assert hasattr(pynvml, name)
        setattr(module, name, function)
    monkeypatch.setitem(sys.modules, "pynvml", module)
    properties = types.SimpleNamespace(uuid="74edc72b-204b-7996-59f6-bff24ec89c23")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return Energy(torch.device("cuda", 0))


def test_energy_is_that_of_the_card_of_this_name_while_it_is_counted(monkeypatch):
    millijoules = iter([1_000, 5_000, 7_500, 100_000, 100_250])
    asked = []
    energy = stand_in(
        monkeypatch,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda name: asked.append(name) or "handle",
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: next(millijoules),
    )
    assert asked == ["GPU-74edc72b-204b-7996-59f6-bff24ec89c23"]
    for counts in (True, False, True, False):
        energy.count(counts)
    assert energy.joules == 2.5 + 0.25


def fail(*_):
    import pynvml

    raise RuntimeError("Not Supported", pynvml)


@pytest.mark.parametrize("failing", ["nvmlInit", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetTotalEnergyConsumption"])
def test_where_nvml_fails_nothing_is_known(monkeypatch, failing):
    functions = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByUUID": lambda name: "handle",
        "nvmlDeviceGetTotalEnergyConsumption": lambda handle: 1,
    }
    energy = stand_in(monkeypatch, **functions | {failing: fail})
    energy.count(True)
    energy.count(False)
    assert energy.joules is None


def test_energy_of_a_run_is_known_where_every_rank_knows_its_own():
    assert energy_of([10.0, 20.0], 60, "images") == {"energy_j": 30.0, "energy_j_per_image": 0.5}
    assert energy_of([10.0, None], 60, "tokens") == {"energy_j": None, "energy_j_per_token": None}
    assert energy_of([None], 60, "images") == {"energy_j": None, "energy_j_per_image": None}


def test_a_card_that_tells_no_more_ends_no_training(monkeypatch):
    energy = Energy(torch.device("cpu"))
    energy.joules = 3.0
    energy.count(is_counting=True)  # there is no NVML to ask
    assert energy.joules is None
    energy.count(is_counting=False)
