"""What operators see: metrics, logs, traces, timelines, the report of the start. Left out: dashboards (deploy/)."""
