"""Words of the command line and of configuration files, before they mean anything."""
