"""Moved: use `server.deployment`. This file goes when nobody imports it any more."""

from server.deployment import Deployment, deployment

__all__ = ["Deployment", "deployment"]
