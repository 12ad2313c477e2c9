"""What every other package stands on: errors, paths, parameter trees."""
