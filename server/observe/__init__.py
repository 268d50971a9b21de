"""What operators see: metrics, logs, traces, timelines, the startup report. Left out: dashboards (deploy/)."""
