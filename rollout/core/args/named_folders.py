"""`NamedFolders`: which folders of this machine a caller may have read or written, by name.

    --weight-folders    unset, with a key                unset, without a key               given
    read                any                              any                                these, and the model's own
    write               any                              scratch, next to the model         these

Checkpoints and published versions are read; local checkpoints, profiles and dumps are written.  What is read must be
tensors of the model's names and shapes, or it is refused: reading gives nothing away but that a path exists.  Without a
key any user of the machine can call: writing is then left to places where all of them may write anyway, and to where
the checkpoints are.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rollout.core.args.server_args import ServerArgs
from rollout.core.errors import BadRequest

_SCRATCH = ("/tmp", "/var/tmp", "/dev/shm")


@dataclass(frozen=True)
class NamedFolders:
    """Roots of the folders that may be read and written; None: any folder."""

    read: tuple[Path, ...] | None
    write: tuple[Path, ...] | None

    @classmethod
    def of(cls, args: ServerArgs) -> NamedFolders:
        model = Path(args.model_path)
        if args.weight_folders is not None:
            roots = tuple(Path(root) for root in args.weight_folders.split(os.pathsep) if root)
            return cls((*roots, model), roots)
        if args.api_key or args.admin_api_key:
            return cls(None, None)
        return cls(None, (*map(Path, _SCRATCH), Path(tempfile.gettempdir()), model.resolve().parent))

    def readable(self, path: str) -> Path:
        """Return the folder or file, links resolved.  Raises `BadRequest` if it may not be read."""
        return _within(path, self.read)

    def writable(self, path: str) -> Path:
        """Return the folder or file, links resolved.  Raises `BadRequest` if it may not be written."""
        return _within(path, self.write)


def _within(path: str, roots: tuple[Path, ...] | None) -> Path:
    try:
        resolved = Path(path).resolve()
        if roots is None or any(_holds(root.resolve(), resolved) for root in roots):
            return resolved
    except (OSError, ValueError, RuntimeError) as error:
        raise BadRequest(f"{path[:200]!r} cannot be accessed: {str(error)[:200]}") from None
    allowed = ", ".join(map(str, roots))
    raise BadRequest(f"{path[:1000]} is outside the folders of this server ({allowed}); see --weight-folders")


def _holds(root: Path, path: Path) -> bool:
    """Tell whether `path` lies in `root`, in no hidden folder: such folders hold settings and keys, not checkpoints."""
    return path.is_relative_to(root) and not any(part.startswith(".") for part in path.relative_to(root).parts)
