"""timm's own training step, made of parts of the installed package.

Kept: timm's model of that name, its ClassificationTask with its wrapper for several ranks, its SGD with Nesterov
momentum 0.9, a decay of 2e-5 and none on norms and biases, fp32, and what its train.py does around a step: times of
data and step, the loss read after each batch, zero_grad after the step, a line with the loss over all ranks every 50
steps.
Left out: the loader and its prefetcher, which are for GPUs; EMA, mixup and the schedule, which are off by default, or
act once an epoch. Its train.py passes device_ids to DDP on CPUs too, where torch raises: they are left out here.

Source: https://github.com/huggingface/pytorch-image-models (train.py), https://pypi.org/project/timm
"""

import time

import timm
import torch
import torch.distributed as dist
from timm.optim import create_optimizer_v2  # pyright: ignore[reportPrivateImportUsage]
from timm.task import ClassificationTask
from timm.utils import AverageMeter, reduce_tensor  # pyright: ignore[reportPrivateImportUsage]

from contenders import Train, Work

LOG_STEPS = 50


def build(work: Work) -> Train:
    """timm's loop over `work`."""
    model = timm.create_model(work.model, num_classes=work.num_classes)
    optimizer = create_optimizer_v2(model, opt="sgd", lr=0.05, momentum=0.9, weight_decay=2e-5)
    task = ClassificationTask(model, device=torch.device("cpu"), verbose=False).prepare_distributed()
    lines: list[str] = []

    def train(number: int, num_steps: int) -> None:
        task.train()
        optimizer.zero_grad()
        data_time, update_time, losses = AverageMeter(), AverageMeter(), AverageMeter()
        ended = time.time()
        for step, (images, labels) in enumerate(work.batches(number, num_steps)):
            data_time.update(time.time() - ended)
            loss = task(images, labels)["loss"]
            loss.backward()
            optimizer.step()
            losses.update(loss.item(), len(images))
            optimizer.zero_grad()
            update_time.update(time.time() - ended)
            if step % LOG_STEPS == 0:
                mean = reduce_tensor(loss.detach(), dist.get_world_size()).item()
                rates = [group["lr"] for group in optimizer.param_groups]
                lines.append(f"{number}: {step} {mean:.3g} ({losses.avg:.3g}) {update_time.val:.3f}s {rates[0]:.3e}")
            ended = time.time()

    return train
