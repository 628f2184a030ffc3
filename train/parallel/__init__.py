"""What strategies are made of: how gradients are added up, and how replicas, shards and stages do their parts."""
