# The service, and `extproc sim`, in one small image. The protobuf stubs are generated while the package is built.
FROM python:3.13-slim AS build
WORKDIR /src
RUN python -m venv /opt/extproc
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY protos protos
COPY extproc extproc
RUN /opt/extproc/bin/pip install --no-cache-dir --no-compile .

FROM python:3.13-slim
COPY --from=build /opt/extproc /opt/extproc
ENV PATH=/opt/extproc/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 10001:10001
EXPOSE 9002 9003
HEALTHCHECK --interval=5s --timeout=3s --start-period=20s --retries=3 \
  CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:9003/healthz', timeout=2)"]
ENTRYPOINT ["extproc"]
CMD ["serve", "--config", "/etc/extproc/extproc.yaml"]
