"""`RemoteCopies`: copies of a run's checkpoints in a mounted folder or a store that fsspec opens. No torch."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from llamarl.checkpoint.folder import (
    CRITIC,
    MANIFEST,
    CheckpointError,
    describe,
    read_manifest,
    removable_steps,
    step_folder,
)
from llamarl.config.errors import ConfigError
from llamarl.config.schema import CheckpointConfig
from llamarl.observability.files import sync
from llamarl.run.copies import CopyFailed

BESIDE = ("config.toml", "weights.json")
"""Files of a run's folder that are needed to use its checkpoints."""


@contextmanager
def _failing() -> Iterator[None]:
    try:
        yield
    except CopyFailed:
        raise
    except Exception as error:
        raise CopyFailed(f"{type(error).__name__}: {error}") from error


class RemoteCopies:
    """Copies in `<checkpoint.copy_to>/<name>`, with the structure of the run's folder of checkpoints. The manifest of
    each is written last; a copy without it is incomplete."""

    def __init__(self, settings: CheckpointConfig, name: str) -> None:
        """Raises ConfigError if the remote place cannot be opened."""
        self._settings = settings
        option = f"checkpoint.copy_to = {settings.copy_to!r}"
        try:
            from fsspec.core import url_to_fs
            from fsspec.implementations.local import LocalFileSystem

            self._files, root = url_to_fs(settings.copy_to)
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"{option} cannot be opened: {error}; pip install 'llamarl[remote]', or name a mounted folder"
            ) from None
        self._is_local = isinstance(self._files, LocalFileSystem)
        if self._is_local and not os.path.isdir(root):
            raise ConfigError(f"{option} is not a folder; mount or create it")
        self._root = PurePosixPath(root, name)
        self.name = f"{settings.copy_to.rstrip('/')}/{name}"

    def steps(self, part: str = "", last: str = f"/{MANIFEST}") -> list[int]:
        """Returns the steps of complete copies, ascending. Raises CopyFailed.

        Args:
            part: folder of the executor, empty for the trainer.
            last: end of the paths that are searched. Empty also finds incomplete copies.
        """
        with _failing():
            self._files.invalidate_cache()
            found = self._files.glob(str(self._root / part / ("step-" + "[0-9]" * 8)) + last)
        names = [part for path in found for part in PurePosixPath(path).parts if part.startswith("step-")]
        return sorted(int(name.removeprefix("step-")) for name in names)

    def copy(self, checkpoints: Path, step: int) -> None:
        """Copies a checkpoint unless the same one is there, then removes earlier copies that are not kept.

        Its files are linked first, so that they exist until they are copied. Raises CopyFailed.
        """
        name, held = step_folder(step), checkpoints / ".copying"
        shutil.rmtree(held, ignore_errors=True)
        with _failing():
            parts = [part for part in (CRITIC, "") if (checkpoints / part / name).is_dir()]
            for part in parts:
                shutil.copytree(checkpoints / part / name, held / part / name, copy_function=os.link)
            for part in parts:
                self._put(held / part / name, self._root / part / name)
            for path in (checkpoints.parent / one for one in BESIDE):
                if path.exists():
                    self._files.put_file(str(path), str(self._root / path.name))
            shutil.rmtree(held)
            for part in parts:
                self._prune(part, step)

    def _put(self, source: Path, target: PurePosixPath) -> None:
        manifest, mark = read_manifest(source), str(target / MANIFEST)
        if self._files.exists(mark):
            if self._files.cat_file(mark) == (source / MANIFEST).read_bytes():
                return
            self._files.rm_file(mark)  # first, because it belongs to another checkpoint of the same step
        self._files.makedirs(str(target), exist_ok=True)
        for name, file in manifest["files"].items():
            path = str(target / name)
            self._files.put_file(str(source / name), path)
            self._files.invalidate_cache()
            size = self._files.size(path)
            if size != file["bytes"] or (self._is_local and describe(Path(path)) != file):
                raise CopyFailed(f"{path} differs from the sent file: {size} of {file['bytes']} bytes")
            if self._is_local:
                sync(Path(path))
        self._files.put_file(str(source / MANIFEST), mark)

    def _prune(self, part: str, step: int) -> None:
        finished, settings = set(self.steps(part)), self._settings
        past = [one for one in self.steps(part, "") if one <= step]
        for old in removable_steps(past, settings.keep, settings.keep_every, finished.__contains__):
            self._files.rm(str(self._root / part / step_folder(old)), recursive=True)

    def bring_back(self, run: Path) -> int | None:
        """Copies the newest intact checkpoint to this run's folder. Returns its step, or None if there is no copy.

        Raises:
            CopyFailed: all copies are damaged, or the place cannot be reached.
        """
        faults = list[str]()
        for step in reversed(steps := self.steps()):
            try:
                with _failing():
                    for part in (CRITIC, ""):
                        if part == "" or step in self.steps(part):
                            self._get(self._root / part / step_folder(step), run / "checkpoints" / part)
                    for path in (run / one for one in BESIDE):
                        if not path.exists() and self._files.exists(str(self._root / path.name)):
                            self._files.get_file(str(self._root / path.name), str(path))
                return step
            except CopyFailed as error:
                faults.append(str(error))
        if steps:
            raise CopyFailed(f"no copy is intact: {faults[0]}")
        return None

    def _get(self, source: PurePosixPath, folder: Path) -> None:
        partial, final = folder / f".writing-{source.name}", folder / source.name
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        self._files.get_file(str(source / MANIFEST), str(partial / MANIFEST))
        for name, file in read_manifest(partial)["files"].items():
            self._files.get_file(str(source / name), str(partial / name))
            if describe(partial / name) != file:
                raise CheckpointError(f"{source / name} differs from its manifest (truncated or changed)")
            sync(partial / name)
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)

    def clear(self) -> None:
        """Removes all copies. Raises CopyFailed."""
        with _failing():
            for part in (CRITIC, ""):
                for step in self.steps(part, ""):
                    self._files.rm(str(self._root / part / step_folder(step)), recursive=True)
