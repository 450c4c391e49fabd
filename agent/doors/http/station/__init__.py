"""`/api` of the station: what it can be asked and told, its routes, and their JSON."""
