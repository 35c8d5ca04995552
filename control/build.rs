//! Compiles the protobuf of the control service; needs no `protoc`.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let file = "proto/cadre/control/v1alpha1/control.proto";
    println!("cargo:rerun-if-changed={file}");
    let descriptors = protox::compile([file], ["proto"])?;
    tonic_prost_build::configure().compile_fds(descriptors)?;
    Ok(())
}
