"""Raw data sets, environments, partitions, and tables of sites. Named recipes are in `scenarios/`; no model, no training."""
