"""Delta frames as versions before 2 wrote them."""

from __future__ import annotations

import json
import struct

from weight_sync.delta.compression import compress
from weight_sync.delta.frame import DeltaFrame
from weight_sync.tensor_meta import dtype_name


def write_old_frame(frame: DeltaFrame) -> bytes:
    """Return the bytes of a frame."""
    entries = [frame.entry(at) for at in range(len(frame.metas))]
    described = {
        "base_digest": frame.base_digest,
        "digest": frame.digest,
        "packed": [len(packed) for packed in frame.packed],
        "tensors": [
            [
                entry.meta.name,
                dtype_name(entry.meta.dtype),
                list(entry.meta.shape),
                entry.sizes.num_changes,
                entry.sizes.is_dense,
                list(entry.sizes.counts),
            ]
            for entry in entries
        ],
    }
    index = json.dumps(described, separators=(",", ":")).encode()
    packed_index = compress(index, level=3)
    head = struct.pack("<8sII", b"LKSDELT1", len(packed_index), len(index))
    return b"".join([head, packed_index, frame.fingerprints.astype("<u8").tobytes(), *frame.packed])
