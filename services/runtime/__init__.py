"""What every service shares: server and channel set-up, settings, errors, logs, and where models are found."""
