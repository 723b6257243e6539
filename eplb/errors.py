"""Errors of expert placement.  `status_code` is the HTTP status under which an engine reports them.

EplbError             500
+-- EplbRequestError  400  the call is wrong; nothing was changed
|   +-- LayoutError   400  numbers of experts, slots, ranks or nodes that do not fit together
|   +-- LoadsError    400  counts of another shape, negative or not finite
|   +-- MapError      400  a map that misses an expert, repeats one on a rank, or is of another shape
+-- RebalanceRefused  409  not now; nothing was changed
+-- TransferError     500  experts could not be moved; every slot holds what it held before
+-- TornTransferError 503  slots hold other experts than the map, and could not be restored
"""

from __future__ import annotations


class EplbError(Exception):
    """Base of every error of this library."""

    status_code = 500


class EplbRequestError(EplbError):
    """The call is wrong; nothing was changed."""

    status_code = 400


class LayoutError(EplbRequestError):
    """Numbers of experts, slots, ranks, nodes or groups that do not fit together."""


class LoadsError(EplbRequestError):
    """Counts of another shape than the layout's, negative or not finite."""


class MapError(EplbRequestError):
    """A map of slots to experts that cannot be served from."""


class RebalanceRefused(EplbError):
    """Experts cannot be moved in the present state; nothing was changed."""

    status_code = 409


class TransferError(EplbError):
    """Experts could not be moved; every slot of every rank holds what it held before."""


class TornTransferError(EplbError):
    """Some rank's slots hold other experts than the map in force: nothing may be computed from them."""

    status_code = 503
