"""What computes the softmax of the loss: torch, or on CUDA the kernel of liger-kernel where it is installed and right.

Between the product that makes a chunk of logits and the products that use its gradient there is one step over the
chunk, `modeling.projected_loss.ChunkLoss`. That step alone is replaced. What a run relies on stays where it is:
gradients of the projection summed in float32 and in one order, rows without a target left out, the loss of each
target, tied and padded vocabularies.
"""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass

import torch

from ..modeling.loss import IGNORE_INDEX
from ..modeling.projected_loss import ChunkLoss, chunk_loss, projected_loss

TORCH = "torch"
PACKAGE = "liger-kernel"
OLDEST = (0, 8)  # whose kernel takes these arguments
INSTALL = "pip install 'hf-tinylm[cuda-kernels]'"
KERNEL_DEVICES = ("cuda",)
ROWS = 16  # of the comparison
# Its own error against float64 may be twice that of torch's operations, and some roundings of float32 more: the
# exponential of GPUs is good to two of them (2^-22), its argument and the sum of a row to a few each. One rounding to
# bfloat16 in the wrong direction is 2^-9, a thousand times as much.
LARGEST_RATIO, ROUNDINGS = 2.0, 16 * 2.0**-23


@dataclass(frozen=True)
class LossKernel:
    """What computes the loss of a chunk, and why.

    Attributes:
        name: `torch`, or the package and its version.
        of_chunk: the kernel; None: torch's operations, compiled where the run is.
        refused: it is there, and something is wrong with it.
    """

    name: str
    why: str
    of_chunk: ChunkLoss | None = None
    refused: bool = False

    @property
    def told(self) -> str:
        """One sentence for the start of a run."""
        return f"loss kernel {self.name}: {self.why}"


def choose_loss_kernel(asked: str, device: torch.device, vocab_size: int, dtype: torch.dtype) -> LossKernel:
    """The choice, made once at the start of a run.

    Args:
        asked: `auto`, or `torch` for torch's operations in any case.
        vocab_size: columns of the logits.
        dtype: of matrix products.
    """
    if asked == TORCH:
        return LossKernel(TORCH, f"loss_kernel={TORCH} was asked for")
    if device.type not in KERNEL_DEVICES:
        return LossKernel(TORCH, f"{PACKAGE} is for CUDA, and this run is on {device.type}")
    version = installed_version()
    if version is None:
        return LossKernel(TORCH, f"{PACKAGE} is not installed ({INSTALL})")
    name = f"{PACKAGE} {version}"
    if _numbers(version) < OLDEST:
        needed = ".".join(map(str, OLDEST))
        return LossKernel(TORCH, f"{name} is installed, {needed} or later is needed ({INSTALL})", refused=True)
    try:
        kernel = liger_chunk_loss()
        wrong = difference_from_torch(kernel, device, vocab_size, dtype)
    except Exception as error:  # whatever an import, a compiler or a driver raises
        wrong = f"it fails here: {' '.join(str(error).split())[:200]}"
    if wrong is not None:
        return LossKernel(TORCH, f"{name} is not used, as {wrong}", refused=True)
    return LossKernel(name, "its loss and gradients on this device are as near to float64 as torch's own", kernel)


def installed_version() -> str | None:
    """The version of liger-kernel; None when it is not installed."""
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """The first two numbers of a version; none of something else, which is older than any."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return tuple(map(int, found.groups())) if found else ()


def liger_chunk_loss() -> ChunkLoss:
    """`chunk_loss` by Liger's cross-entropy kernel: one pass for the softmax and one for the gradient.

    The kernel is launched by itself. The package's functions around it read the number of targets back from the device
    at each call (0.8.5: `cross_entropy_forward`, `fused_linear_cross_entropy_forward`), and the one that holds the
    projection too casts all of it anew for each chunk under autocast. Source: arXiv 2410.10989, 3.1.
    """
    from liger_kernel.ops import cross_entropy

    warps = 16 if torch.version.hip else 32

    @torch.compiler.disable
    def of_chunk(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        losses = torch.zeros(len(targets), dtype=torch.float32, device=logits.device)
        if not len(targets):
            return losses
        columns = logits.shape[1]
        cross_entropy.liger_cross_entropy_kernel[(len(targets),)](
            X_ptr=logits, X_stride=logits.stride(0), n_cols=columns, Y_ptr=targets, Y_stride=targets.stride(0),
            loss_ptr=losses, loss_stride=losses.stride(0), reduction="sum", ignore_index=IGNORE_INDEX,
            n_non_ignore=1, sum_non_ignore_weight=1, weight_ptr=None, weight_sum=0.0, HAS_WEIGHT=False,
            z_loss_ptr=None, lse_square_scale=0.0, RETURN_Z_LOSS=False, label_smoothing=0.0,
            token_accuracy_ptr=None, token_accuracy_stride=0, RETURN_TOKEN_ACCURACY=False,
            predicted_tokens_ptr=None, predicted_tokens_stride=0, RETURN_PREDICTED_TOKENS=False,
            softcap=None, HAS_SOFTCAPPING=False, HAS_GRADIENTS=True, num_warps=warps,
            BLOCK_SIZE=min(cross_entropy.MAX_FUSED_SIZE, 1 << (columns - 1).bit_length()),
        )  # fmt: skip
        return losses

    return of_chunk


def difference_from_torch(kernel: ChunkLoss, device: torch.device, vocab_size: int, dtype: torch.dtype) -> str | None:
    """What makes a kernel unfit for a run, in words; None when nothing does.

    Loss and both gradients of a few rows are compared with float64 beside torch's own, twice, as a resume needs the
    same bits again; and a logit that is not a number must not be lost, since it is how a broken run is noticed.

    Args:
        dtype: of matrix products; logits are rounded to it.
    """
    hidden, weight, labels = _sample(vocab_size)
    found = [
        _loss_and_gradients(each, hidden.to(device), weight.to(device), labels, to)
        for each, to in ((chunk_loss, torch.float64), (chunk_loss, dtype), (kernel, dtype), (kernel, dtype))
    ]
    exact, own, first, second = found
    for part, name in enumerate(("loss", "gradient of the hidden states", "gradient of the projection")):
        scale = float(exact[part].norm())
        own_error, error = (float((each[part].double() - exact[part]).norm()) / scale for each in (own, first))
        limit = LARGEST_RATIO * own_error + ROUNDINGS
        if not error <= limit:
            return f"the {name} is {error:.1e} away from float64 (torch: {own_error:.1e}; allowed: {limit:.1e})"
        if not torch.equal(first[part], second[part]):
            return f"the {name} has other bits the second time"
    logits = torch.zeros(1, vocab_size, dtype=dtype, device=device)
    logits[0, 1] = torch.nan
    if bool(torch.isfinite(kernel(logits, torch.zeros(1, dtype=torch.int64, device=device))).all()):
        return "its loss hides a logit that is not a number"
    return None


def _sample(vocab_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states (1, ROWS, ROWS), a projection (vocab_size, ROWS) and targets (1, ROWS), on the host.

    Rows of the identity make the projection's columns the logits, and their gradient that of the projection, without a
    rounding of a product in between. Every second target is nearly certain, where `p - 1` would cancel; one is none.
    """
    generator = torch.Generator().manual_seed(1)
    weight = (3.0 * torch.randn(vocab_size, ROWS, generator=generator)).bfloat16().float()
    targets = torch.randint(vocab_size, (ROWS,), generator=generator)
    certain = torch.arange(0, ROWS, 2)
    weight[targets[certain], certain] = 20.0
    targets[ROWS // 2 - 1] = IGNORE_INDEX
    return torch.eye(ROWS)[None], weight, targets[None]


def _loss_and_gradients(
    of_chunk: ChunkLoss, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As a run computes them: float32 weights under autocast to `dtype`, or all of it in float64."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    hidden, weight = (x.to(wide, copy=True).requires_grad_() for x in (hidden, weight))
    with torch.autocast(hidden.device.type, dtype=dtype, enabled=dtype in (torch.bfloat16, torch.float16)):
        total = projected_loss(hidden, weight, labels, of_chunk)
    total.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return total.detach(), hidden.grad, weight.grad
