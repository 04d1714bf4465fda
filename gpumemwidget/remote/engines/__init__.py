"""The engines of clusters, whose processes can be watched: each by the channel that it has."""
