"""What several test files of this folder share."""

from __future__ import annotations

from tests.s3_service import s3, s3_endpoint

__all__ = ["s3", "s3_endpoint"]
