"""The ClientApp: the client half of a method, on this client's data."""

import perennial
from plain.task import Net, load_data

app = perennial.client_app(method="fediir", data=load_data, model=Net)
