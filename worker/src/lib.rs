//! The processes of a job: reference trainer, attention server, conductor and local supervisor.

pub mod trainer;
