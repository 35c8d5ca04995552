# The image of Cadre: `cadre` (trainers, servers) and `cadre-operator`, nothing else to run.
#
#     docker build -t example/cadre:0.1.0 .
#     helm install cadre charts/cadre --set image.repository=example/cadre
#
# The programs find CUDA at run time, if the node and the pod give it; it is not in the image.
FROM rust:1.95-bookworm AS build
WORKDIR /cadre
COPY . .
# The kernels for Hopper GPUs are built first, with nvcc from PyPI, and are in the programs.
RUN --mount=type=cache,target=/usr/local/cargo/registry \
    --mount=type=cache,target=/root/.cache \
    --mount=type=cache,target=/cadre/target \
    scripts/machine python c++ \
    && scripts/kernels \
    && cargo build --release --locked -p cadre -p cadre-operator --features cadre/cluster \
    && mkdir /programs \
    && for program in cadre cadre-operator; do strip -o "/programs/$program" "target/release/$program"; done

FROM debian:bookworm-slim
COPY --from=build /programs/ /usr/local/bin/
ENV PATH=/usr/local/bin
USER 65532:65532
ENTRYPOINT ["cadre"]
