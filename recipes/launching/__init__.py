"""How a run is started and kept going: processes, machines, restarts."""
