"""Pipeline schedules as data, and the one executor that runs them."""
