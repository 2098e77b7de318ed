"""Names of Flower's that it does not promise to keep, in one place: whoever needs one imports it from here."""

from flwr.common import log
from flwr.common.constant import ErrorCode, SubStatus
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError
from flwr.supercore.retry import RetryInvoker, RetryState
from flwr.supercore.run import Run

__all__ = ["ErrorCode", "ObjectPushError", "RetryInvoker", "RetryState", "Run", "SubStatus", "log"]
