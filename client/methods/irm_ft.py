"""IRM-FT, client half: federated IRM's steps for the shared model, FTFA's for the personal one."""

from perennial.client.methods.ftfa import FtfaClient
from perennial.client.methods.irm import IrmClient
from perennial.common.methods.irm_ft import IrmFt


class IrmFtClient(FtfaClient[IrmFt], IrmClient[IrmFt]):
    """`loss` is IRM's, `fine_tuned` and `public_code` are FTFA's (PerInvFL §5.2)."""

    stacks = ("train", "evaluate")
