"""The seam between the API and the deployments: requests in, events and media out."""
