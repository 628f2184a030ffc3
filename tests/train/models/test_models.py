import pytest
import torch

from muster.config import Options
from muster.errors import MusterError
from muster.train import models
from muster.train.parallel.strategy import loss_of, predictions_of


@pytest.mark.parametrize(("name", "offered"), [("resnet81", "resnet18"), ("ResNet-50", "resnet50"), ("vitb16", "vit_")])
def test_unknown_model_offers_the_nearest(name, offered):
    with pytest.raises(MusterError) as raised:
        models.build(Options(model=name), 10, 32)
    assert offered in raised.value.fix
    assert f"--model={name}" in raised.value.seen


def test_models_of_other_tasks_are_unknown():
    with pytest.raises(MusterError):
        models.build(Options(model="fcn_resnet50"), 10, 224)


@pytest.mark.parametrize(
    ("name", "image_size"),
    [
        ("resnet18", 32),
        ("vit_b_16", 64),
        ("regnet_y_400mf", 32),
        ("googlenet", 64),
        pytest.param("inception_v3", 299, marks=pytest.mark.long),
    ],
)
def test_a_step_of_each_kind(name, image_size):
    model = models.build(Options(model=name), 7, image_size)
    labels = torch.tensor([1, 6])
    outputs = model(torch.randn(2, 3, image_size, image_size))
    loss_of(outputs, labels).backward()
    assert predictions_of(outputs).shape == (2,)
    # Under DDP a parameter that has no part in the loss would hang the others.
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.eval()
    assert predictions_of(model(torch.randn(2, 3, image_size, image_size))).shape == (2,)


@pytest.mark.parametrize(
    ("name", "image_size", "batch_size", "fix"),
    [
        ("inception_v3", 32, 8, "--image-size"),
        ("vit_b_16", 40, 8, "--image-size"),
        ("maxvit_t", 100, 8, "--image-size"),
        ("resnet18", 32, 1, "--batch-size"),
    ],
)
def test_images_that_a_model_can_not_take(name, image_size, batch_size, fix):
    with pytest.raises(MusterError) as raised:
        models.build(Options(model=name, batch_size=batch_size), 10, image_size)
    assert fix in raised.value.fix
    assert raised.value.code == 2


def test_weights_follow_the_seed():
    def weights(seed):
        torch.manual_seed(seed)
        return models.build(Options(model="squeezenet1_1"), 4, 64).state_dict()

    def are_equal(one, other):
        return all(torch.equal(a, b) for a, b in zip(one.values(), other.values(), strict=True))

    assert are_equal(weights(1), weights(1))
    assert not are_equal(weights(1), weights(2))


@pytest.mark.parametrize("name", ["layer4.0.conv1", "layer4.1.conv1"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_gradients_in_bfloat16_are_right_where_the_maps_are_down_to_one_pixel(layout, name):
    torch.manual_seed(3)
    model = models.place(models.build(Options(model="resnet18"), 10, 16), torch.device("cpu"), layout, 0)
    convolution = model.get_submodule(name)
    assert isinstance(convolution, torch.nn.Conv2d)
    images = torch.randn(4, convolution.in_channels, 1, 1).to(memory_format=layout).requires_grad_()
    # Frees memory full of NaN for the kernel to use: any element that it does not write stays NaN.
    rubbish = [torch.full_like(convolution.weight, float("nan"), dtype=torch.bfloat16) for _ in range(4)]
    del rubbish
    with torch.autocast("cpu", dtype=torch.bfloat16):
        convolution(images).float().pow(2).sum().backward()
    plain = torch.nn.functional.conv2d(images.detach(), convolution.weight, stride=convolution.stride, padding=1)
    assert convolution.weight.grad is not None
    got = convolution.weight.grad
    middle = torch.einsum("bd,bc->dc", 2 * plain.flatten(1), images.detach().flatten(1))
    assert torch.allclose(got[:, :, 1, 1], middle, rtol=0.05, atol=0.05)
    got[:, :, 1, 1] = 0
    assert not got.any()


@pytest.mark.parametrize("image_size", [32, 64])
def test_gradients_do_not_depend_on_how_weights_lie_in_memory(image_size):
    def gradients(layout):
        torch.manual_seed(3)
        model = models.place(models.build(Options(model="resnet18"), 10, image_size), torch.device("cpu"), layout, 0)
        model.double()
        images = torch.randn(3, 3, image_size, image_size, dtype=torch.float64).to(memory_format=layout)
        loss_of(model(images), torch.tensor([1, 2, 3])).backward()
        return {name: weight.grad for name, weight in model.named_parameters()}

    other = gradients(torch.contiguous_format)
    for name, gradient in gradients(torch.channels_last).items():
        assert torch.allclose(gradient, other[name], rtol=1e-6, atol=1e-9), name
