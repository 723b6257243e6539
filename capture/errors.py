"""Errors of route records, sampling masks, log-probabilities and hidden states.

`status_code` is the HTTP status under which an engine reports them.

CaptureError                  500
+-- RouteFormatError          400  bytes or text that are not an undamaged route record
+-- RouteValueError           400  ids, shapes or spans that no model can have produced
+-- MissingRowsError          500  rows that were asked for were never recorded
+-- UnsupportedRouterError    400  a model whose routers replay cannot drive
+-- MaskFormatError           400  bytes or text that are not a sampling mask
+-- MaskValueError            400  a sampling mask that no sampler can have produced, or of other tokens
+-- LogprobFormatError       400  bytes or text that are not an undamaged record of log-probabilities
+-- LogprobValueError        400  arrays that do not fit, ids outside the vocabulary, or of other tokens
+-- HiddenStatesError         400  bytes that are not hidden states of their shape, or records that do not follow
"""

from __future__ import annotations


class CaptureError(Exception):
    """Base of every error of this library."""

    status_code = 500


class RouteFormatError(CaptureError):
    """The wire form is damaged, or is no route record at all."""

    status_code = 400


class RouteValueError(CaptureError):
    """Ids, shapes or spans that no model can have produced."""

    status_code = 400


class MissingRowsError(CaptureError):
    """Rows that were asked for were never recorded."""


class UnsupportedRouterError(CaptureError):
    """The model has no routers, or routers that weigh experts in a way that replay does not support."""

    status_code = 400


class MaskFormatError(CaptureError):
    """Bytes or text that are not a sampling mask."""

    status_code = 400


class MaskValueError(CaptureError):
    """A sampling mask that no sampler can have produced, or one of other tokens."""

    status_code = 400


class LogprobFormatError(CaptureError):
    """Bytes or text that are not an undamaged record of log-probabilities."""

    status_code = 400


class LogprobValueError(CaptureError):
    """Log-probabilities whose arrays do not fit, of ids outside the vocabulary, or of other tokens."""

    status_code = 400


class HiddenStatesError(CaptureError):
    """Bytes that are not hidden states of their shape, or records that do not follow one another."""

    status_code = 400
