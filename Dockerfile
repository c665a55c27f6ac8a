# The router and its mock workers: `docker run IMAGE serve ...` or `docker run IMAGE mock ...`.
FROM python:3.11-slim

WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY app app
COPY backends backends
COPY mocker mocker
RUN pip install --no-cache-dir --disable-pip-version-check --root-user-action=ignore -c constraints.txt . \
    && useradd --system --uid 10001 --no-create-home --shell /usr/sbin/nologin coatcheck \
    && install --directory --owner=coatcheck --mode=700 /var/lib/coatcheck

# Where claims are kept unless --claims names another store.
ENV XDG_STATE_HOME=/var/lib \
    PYTHONUNBUFFERED=1

WORKDIR /var/lib/coatcheck
# By number, so that Kubernetes can see that it is not root.
USER 10001
EXPOSE 8000
ENTRYPOINT ["coatcheck"]
CMD ["--help"]
