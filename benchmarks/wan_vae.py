# SPDX-License-Identifier: Apache-2.0
"""Time the decoder of Wan's video autoencoder (diffusers' AutoencoderKLWan, random weights): eager, Inductor, ours.

`python -m benchmarks.wan_vae --height 720 --width 1280 --frames 21` decodes latent frames one by one, each with the
cache of the frames before it. The first two have other graphs than the later ones. With `--steady` they stay eager, so
that only the graph of later frames is compiled. Needs diffusers.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

WAYS = ("eager", "eager channels last", "inductor", "inductor channels last", "tile")
OPTIONS = {"tile": {"select": "tile", "families": ["conv"]}, "contest": {}}


@contextlib.contextmanager
def hidden(*packages: str) -> Iterator[None]:
    """Let other packages not find these while they are imported."""
    absent = [name for name in packages if name not in sys.modules]
    sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]  # Python's own mark of what cannot be imported
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]


def autoencoder(device: str, dtype: torch.dtype, small: bool) -> Any:
    """Make the autoencoder with random weights."""
    # diffusers imports them wherever they are installed, also where they fail. The decoder uses none.
    with hidden("peft", "transformers", "torchvision"):
        from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"base_dim": 16, "num_res_blocks": 1} if small else {}
    with torch.device(device):
        return AutoencoderKLWan(**sizes).to(dtype).eval()


def channels_last(model: torch.nn.Module) -> None:
    """Store the weights of convolutions with their channels last."""
    for weight in model.parameters():
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        weight.data = weight.data.contiguous(memory_format=formats.get(weight.dim(), torch.contiguous_format))


def decode(vae: Any, decoders: list[Callable[..., Any]], z: torch.Tensor) -> tuple[list[torch.Tensor], list[float]]:
    """Decode latent frame n by `decoders[min(n, 2)]`; return the frames, and the seconds of each latent frame."""
    vae.clear_cache()
    parts, seconds = [], []
    for n in range(z.shape[2]):
        vae._conv_idx = [0]
        first = {"first_chunk": True} if n == 0 else {}
        _synchronize(z)
        begin = time.perf_counter()
        parts.append(decoders[min(n, 2)](z[:, :, n : n + 1], feat_cache=vae._feat_map, feat_idx=vae._conv_idx, **first))
        _synchronize(z)
        seconds.append(time.perf_counter() - begin)
    vae.clear_cache()
    return parts, seconds


def _synchronize(x: torch.Tensor) -> None:
    """Wait for the GPU, if there is one."""
    if x.is_cuda:
        torch.cuda.synchronize()


def decoders_of(vae: Any, way: str, select: str, steady: bool) -> list[Callable[..., Any]]:
    """Return what decodes the first, the second and later latent frames."""
    if way.startswith("eager"):
        return [vae.decoder] * 3
    ours: dict[str, Any] = {"backend": "tile", "options": OPTIONS[select]} if way == "tile" else {}
    made = torch.compile(vae.decoder.forward, dynamic=False, **ours)
    return [vae.decoder, vae.decoder, made] if steady else [made] * 3


def main() -> None:
    """Run the ways that are asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in (("--height", 720), ("--width", 1280), ("--frames", 21), ("--repeats", 2)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--select", default="tile", choices=list(OPTIONS))
    parser.add_argument("--steady", action="store_true")
    parser.add_argument("--small", action="store_true", help="a sixth of the channels, for a first look")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.backends.cudnn.benchmark = True
    torch._dynamo.config.recompile_limit = 16
    if "tile" in given.ways:
        import torch_tile  # noqa: F401  # registers the backend
    with torch.no_grad():
        vae = autoencoder(device, dtype, given.small)
        sizes = 1, vae.config.z_dim, (given.frames + 3) // 4, given.height // 8, given.width // 8
        z = vae.post_quant_conv(torch.randn(sizes, device=device, dtype=dtype))
        want: torch.Tensor | None = None
        for way in given.ways:
            if way not in ("eager", "inductor"):
                channels_last(vae)
            torch._dynamo.reset()
            begin = time.perf_counter()
            decoders = decoders_of(vae, way, given.select, given.steady)
            parts, _ = decode(vae, decoders, z)
            ready = time.perf_counter() - begin
            got = torch.cat(parts, 2).float().clamp(-1, 1)
            want = got if want is None else want
            difference = (got - want).abs().max().item()
            del parts, got
            runs = [decode(vae, decoders, z)[1] for _ in range(given.repeats)]
            best = [min(times) * 1000 for times in zip(*runs, strict=True)]
            each = " ".join(f"{t:.1f}" for t in best)
            print(f"{way}: {sum(best):.1f} ms ({each}); first {ready:.0f} s; difference {difference:.3g}", flush=True)


if __name__ == "__main__":
    main()
