"""The processes of a site: joining, SuperNode, executor, policy and audit. No training of its own."""
