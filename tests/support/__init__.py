"""What tests share, each module named for what it is: servers, clients, models, recordings."""
