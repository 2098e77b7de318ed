"""Shamir's secret sharing, as Flower has it. Imported where secure aggregation is asked for alone."""

from flwr.common.secure_aggregation.crypto.shamir import combine_shares, create_shares

__all__ = ["combine_shares", "create_shares"]
