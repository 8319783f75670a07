"""Delivery: a finished head goes to S3 or the Hub, and is proven to have arrived whole."""

from peagle_train.delivery.push import PushReceipt, push_head

__all__ = ["PushReceipt", "push_head"]
