"""All services of Kvern on one machine, as child processes: started, watched, restarted, drained."""
