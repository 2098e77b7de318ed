"""Raw data sets, environments, partitions, tables of sites; recipes are in `scenarios/`. No model, no training."""
