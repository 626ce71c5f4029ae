"""Downloads published weights (`torchvision:NAME`, `timm:NAME` or a URL) to a cache, and checks their sha256.

A cached file is checked again on every use. Nothing is downloaded unless the user asks for it by name.
"""

from __future__ import annotations

import difflib
import fcntl
import hashlib
import importlib
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

from reconv.checkpoint.locate import HTTP, HUB
from reconv.core.errors import CheckpointError, ResourceError, UsageError
from reconv.storage.cache import CACHE_ENV, cache_dir
from reconv.storage.download import Progress, digest, download, no_progress
from reconv.storage.files import disk_errors, without_links, write_atomic
from reconv.storage.hub import CONFIG_FILE, WEIGHTS_FILE, HubRepo, authorization
from reconv.storage.object_stores.store import split_url

TORCHVISION_URL = "https://download.pytorch.org/models/"
HUB_URL = "https://huggingface.co/"
URL_VARIABLE = "RECONV_WEIGHTS_URL"  # a mirror of torchvision's download server

# torchvision's files for our models. The eight digits at the end of a file name begin its sha256. A plain name is
# torchvision's IMAGENET1K_V1, and `.v2` IMAGENET1K_V2 where it exists.
TORCHVISION: Mapping[str, str] = {
    "resnet18": "resnet18-f37072fd.pth",
    "resnet34": "resnet34-b627a593.pth",
    "resnet50": "resnet50-0676ba61.pth",
    "resnet50.v2": "resnet50-11ad3fa6.pth",
    "resnet101": "resnet101-63fe2227.pth",
    "resnet101.v2": "resnet101-cd907fc2.pth",
    "resnet152": "resnet152-394f9c45.pth",
    "resnet152.v2": "resnet152-f82ba261.pth",
    "resnext50_32x4d": "resnext50_32x4d-7cdf4587.pth",
    "resnext50_32x4d.v2": "resnext50_32x4d-1a0047aa.pth",
    "resnext101_32x8d": "resnext101_32x8d-8ba56ff5.pth",
    "resnext101_32x8d.v2": "resnext101_32x8d-110c445d.pth",
    "wide_resnet50_2": "wide_resnet50_2-95faca4d.pth",
    "wide_resnet50_2.v2": "wide_resnet50_2-9ba9bcbe.pth",
    "wide_resnet101_2": "wide_resnet101_2-32ee1156.pth",
    "wide_resnet101_2.v2": "wide_resnet101_2-d733dc28.pth",
    "mobilenet_v2": "mobilenet_v2-b0353104.pth",
    "mobilenet_v2.v2": "mobilenet_v2-7ebf99e0.pth",
    "googlenet": "googlenet-1378be20.pth",
    "efficientnet_b0": "efficientnet_b0_rwightman-7f5810bc.pth",
    "efficientnet_b1": "efficientnet_b1_rwightman-bac287d4.pth",
    "efficientnet_b1.v2": "efficientnet_b1-c27df63c.pth",
    "efficientnet_b2": "efficientnet_b2_rwightman-c35c1473.pth",
    "efficientnet_b3": "efficientnet_b3_rwightman-b3899882.pth",
    "efficientnet_b4": "efficientnet_b4_rwightman-23ab8bcd.pth",
    "efficientnet_b5": "efficientnet_b5_lukemelas-1a07897c.pth",
    "efficientnet_b6": "efficientnet_b6_lukemelas-24a108a5.pth",
    "efficientnet_b7": "efficientnet_b7_lukemelas-c5b4e57e.pth",
}

# What the publisher's own programs do with a set of weights that users must know.
_ADVICE: Mapping[str, str] = {
    "googlenet": "they expect pixels from -1 to 1: --set data.preprocess.mean=[0.5,0.5,0.5] and the same for std",
}

_IN_NAME = re.compile(r"-([0-9a-f]{8,64})\.\w+$")
_PINNED = re.compile(r"sha256=([0-9a-fA-F]{8,64})")
_MAX_BYTES = 16 << 30  # of a weights file; the largest convolutional networks have 3 GB


@dataclass(frozen=True, slots=True)
class DownloadedWeights:
    """A file in the cache, and a note for the log on where it came from."""

    path: Path
    note: str


def download_weights(
    name: str, *, cache: Path | None = None, base_url: str | None = None, progress: Progress | None = None
) -> DownloadedWeights:
    """The file of `torchvision:NAME`, `timm:NAME`, hf://OWNER/MODEL or a URL, downloaded unless it is in the cache.

    A URL may end in `#sha256=DIGITS`. If neither the URL nor the file name has the hash, that of the first download is
    stored and checked from then on.
    """
    url, expected = _url(name, base_url)
    headers = authorization() if name.startswith(HUB) else {}
    return _fetch(name, url, expected, cache, headers, progress)


def _fetch(
    name: str, url: str, expected: str, cache: Path | None, headers: Mapping[str, str], progress: Progress | None
) -> DownloadedWeights:
    folder = (cache or cache_dir()) / "weights"
    file_name = Path(unquote(urlsplit(url).path)).name
    if not file_name:
        raise UsageError(f"{url} has no file name", hint="use the full URL of a weights file")
    # Different URLs may have the same file name.
    path = folder / f"{hashlib.sha256(url.encode()).hexdigest()[:8]}-{file_name}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_name(path.name + ".lock")):
            weights = _cached(path, expected) or _download(url, path, expected, headers, progress or no_progress)
            advice = _ADVICE.get(name.partition(":")[2], "") if name.startswith("torchvision:") else ""
            return DownloadedWeights(weights.path, f"{weights.note}; {advice}") if advice else weights
    except OSError as error:
        raise ResourceError(
            "cannot write weights to the cache",
            where=error.filename or str(folder),
            why=error.strerror or str(error),
            hint=f"free some space, or set another cache folder: {CACHE_ENV}=DIR",
        ) from error


def download_hub_config(name: str, *, cache: Path | None = None) -> Path | None:
    """The config.json beside the weights of hf://OWNER/MODEL; None if the repository has none."""
    url = HubRepo.parse(name).url(CONFIG_FILE)
    try:
        return _fetch(name, url, "", cache, authorization(), None).path
    except CheckpointError as error:
        if "404" in error.why:
            return None
        raise


def _url(name: str, base_url: str | None) -> tuple[str, str]:
    """The URL of a name, and the beginning of its sha256 if that is known."""
    if name.startswith(HTTP):
        split_url(name)
        url, fragment = urldefrag(name)
        if not fragment:
            return url, _hash_in(url)
        pinned = _PINNED.fullmatch(fragment)
        if pinned is None:
            raise UsageError(f"unknown URL fragment #{fragment}", hint="use #sha256= followed by the hash of the file")
        return url, pinned[1].lower()
    if name.startswith(HUB):
        return HubRepo.parse(name).url(WEIGHTS_FILE), ""
    package, _, model = name.partition(":")
    if package == "timm":
        url = _timm_url(model)
        return url, _hash_in(url)
    file = TORCHVISION.get(model)
    if file is None:
        close = difflib.get_close_matches(model, TORCHVISION, n=1)
        raise UsageError(
            f"unknown torchvision weights {model!r}",
            why=f"did you mean torchvision:{close[0]}?" if close else "",
            hint="use one of: " + ", ".join(TORCHVISION) + "; or the URL of a file",
        )
    base = base_url or os.environ.get(URL_VARIABLE) or TORCHVISION_URL
    return urljoin(base.rstrip("/") + "/", file), _hash_in(file)


def _timm_url(model: str) -> str:
    """The URL that timm itself would load a model's weights from."""
    try:
        timm = importlib.import_module("timm")
    except ModuleNotFoundError as error:
        raise UsageError(
            "timm is not installed, which is needed to find the URLs of its weights",
            where=f"timm:{model}",
            hint="pip install 'reconv[timm]', or download the weights and use the file",
        ) from error
    try:
        config = timm.get_pretrained_cfg(model, allow_unregistered=False)
    except RuntimeError as error:
        raise _not_in_timm(model, str(error)) from error
    if config.url:
        return str(config.url)
    if config.hf_hub_id:
        return f"{HUB_URL}{config.hf_hub_id}/resolve/main/model.safetensors"
    raise _not_in_timm(model, "the model exists, but it has no pretrained weights")


def _not_in_timm(model: str, why: str) -> UsageError:
    hint = "list the models: python -c 'import timm; print(timm.list_pretrained())'"
    return UsageError(f"timm has no weights {model!r}", why=why, hint=hint)


def _hash_in(name: str) -> str:
    found = _IN_NAME.search(name)
    return found[1] if found else ""


@contextmanager
def _locked(lock: Path) -> Iterator[None]:
    """Only one process at a time downloads a file; the others wait for it."""
    with open(lock, "w", opener=without_links) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _hash_file(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def _cached(path: Path, expected: str) -> DownloadedWeights | None:
    if not path.is_file() or not _hash_file(path).is_file():
        return None
    stored = _hash_file(path).read_text().strip()
    found = digest(path, "sha256")
    if found != stored or not found.startswith(expected):
        raise CheckpointError(
            "the cached weights are not the file that was downloaded",
            where=str(path),
            why=f"its sha256 is {found}, not {expected if found == stored else stored}",
            hint=f"delete the file and run the same command again: rm '{path}'",
        )
    return DownloadedWeights(path, f"from the cache, sha256 {found[:8]}")


def _download(url: str, path: Path, expected: str, headers: Mapping[str, str], progress: Progress) -> DownloadedWeights:
    part = path.with_name(path.name + ".part")
    otherwise = f"download it elsewhere and use the file, or set a mirror: {URL_VARIABLE}=URL"
    download(url, part, progress, error=CheckpointError, otherwise=otherwise, max_bytes=_MAX_BYTES, headers=headers)
    found, num_bytes = digest(part, "sha256"), part.stat().st_size
    if not found.startswith(expected):
        part.unlink()
        raise CheckpointError(
            f"the sha256 of {url} is {found}, not {expected}",
            where=str(part),
            why=f"the file ({num_bytes:,} bytes) was damaged on the way, or is another one; it has been deleted",
            hint="run the same command again",
        )
    # The hash first: a file without one is downloaded again, so a crash between the two does no harm.
    with disk_errors(path):
        write_atomic(_hash_file(path), f"{found}\n")
    part.replace(path)
    checked = "as published" if expected else "(not published; stored for next time)"
    return DownloadedWeights(path, f"{num_bytes / 1e6:.1f} MB from {url}, sha256 {found[:8]} {checked}")
